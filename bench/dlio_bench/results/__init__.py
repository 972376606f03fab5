"""Results of benchmarks: values, their envelope as JSON, statistics, comparison and pages."""
