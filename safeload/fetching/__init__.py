"""Fetch a checkpoint from mirrors that nobody trusts: the manifest says what the bytes are, a server says nothing."""
