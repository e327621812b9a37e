"""What joins Penstock with other projects, each an extra of its own."""
