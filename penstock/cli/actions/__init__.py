"""What the commands do, one module for each noun."""
