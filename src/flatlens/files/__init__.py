"""Writing files whole, and reading files back with checks on their content."""
