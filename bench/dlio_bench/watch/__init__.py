"""`dlio bench watch`: a short run of the benchmarks, compared with a stored one."""
