"""HTTP/1.1 of the data path, both sides: clients in, engines out; it knows no model and no table."""
