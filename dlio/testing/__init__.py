"""Conformance suites that plug-ins run: subclass one, give a factory, inherit its tests."""
