"""The only code that knows sockets: connections, listening, the server's life."""
