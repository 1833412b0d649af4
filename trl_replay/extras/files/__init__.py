"""Groups from files and into files."""
