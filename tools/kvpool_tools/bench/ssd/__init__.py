"""`bench ssd`: the SSD tier against the disk it is on."""
