"""Byte units."""

KB_bytes = 1000
MB_bytes = 1000**2
GB_bytes = 1000**3
TB_bytes = 1000**4
KiB_bytes = 1 << 10
MiB_bytes = 1 << 20
GiB_bytes = 1 << 30
TiB_bytes = 1 << 40
