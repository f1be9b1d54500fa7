"""What the tests stand on: real servers, recorded data, and a brute-force oracle."""
