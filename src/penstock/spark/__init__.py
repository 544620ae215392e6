"""MOVER: segments into tables. The only package that imports pyspark, and only when a job starts."""
