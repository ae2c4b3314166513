"""Bytes <-> frames: sans-I/O RESP2/RESP3 decoders and encoders. No sockets, no server state."""
