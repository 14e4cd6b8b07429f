"""The product on a real cluster: ``make e2e``. README.md says how."""
