"""Home of the conformance suite.

At present a plugin can declare its limits (`core.common.conformance.ConformanceProfile`, returned by the hook
`core_conformance`); the suite that will run against those declarations is not part of this version.
"""
