"""Where jobs run: the protocol of executors, the local one and that of Ray. Commands call an executor an engine."""
