"""Bytes <-> frames: sans-I/O decoders and encoders of RESP2, RESP3 and the binary lane. No sockets,
no server state."""
