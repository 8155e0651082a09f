"""Where jobs run: the executor protocol, the local engine and the Ray engine."""
