"""What happens when a process fails at a named point, is killed, or stands still."""
