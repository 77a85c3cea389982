"""The speech API over HTTP; `engine/server.py` puts its parts together."""
