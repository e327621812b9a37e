"""Room on the disk, and who holds how much of what is limited."""
