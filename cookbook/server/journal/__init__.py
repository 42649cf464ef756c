"""Write-ahead logs of sessions, runs and samples, from which a restarted server recovers its state."""
