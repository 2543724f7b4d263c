"""Who may sign what: keys, the DSSE envelope, strict JSON and the trust store. Importing it loads no cryptography."""
