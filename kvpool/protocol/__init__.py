"""Protocol between daemon, engines and operators: frames, message records, a blocking connection."""
