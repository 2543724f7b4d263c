"""From one `Report` to what people and machines read. Nothing here prints, judges or opens a file."""
