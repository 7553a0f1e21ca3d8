"""What people use, written once over the engine seam."""
