"""What starts or reads whole runs, from outside."""
