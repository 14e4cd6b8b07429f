"""What a rank checks of its machine before it serves."""
