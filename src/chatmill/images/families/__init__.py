"""What each family of processors writes for a picture; one file each."""
