"""Write files completely or not at all, and read files with checks of their content."""
