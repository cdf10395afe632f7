"""The console: what was typed comes in, text and exit codes go out. Decodes nothing itself."""
