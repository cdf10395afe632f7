"""A pair measured: races against plain decoding, their figures and pictures, and what acceptance depends on."""
