"""The server: translation over WebSockets and HTTP."""
