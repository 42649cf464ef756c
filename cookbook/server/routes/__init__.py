"""What is answered under which address. A route reads the request and writes the answer; what happens is elsewhere."""
