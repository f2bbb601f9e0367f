"""Tests of the HTTP gateway, over real sockets unless a part is pure."""
