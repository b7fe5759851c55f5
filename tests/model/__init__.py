"""Random operations against a plain dict."""
