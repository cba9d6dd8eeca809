"""Set-up, launch, benchmarks: thin command lines over the packages."""
