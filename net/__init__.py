"""How bytes move: frames, channels, transports, HTTP."""
