"""Wire formats: JSON and protobuf bodies of requests, results, errors and traced losses."""
