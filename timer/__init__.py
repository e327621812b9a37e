"""Deadlines and delayed messages: what is due, when it is due, in bounded memory."""
