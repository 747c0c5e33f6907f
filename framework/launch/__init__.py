"""How processes come to life: what the environment and the command line say before anything is composed."""
