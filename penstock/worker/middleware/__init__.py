"""Middlewares that come with the worker, one a file."""
