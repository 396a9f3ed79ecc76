"""Other libraries run their Gated DeltaNet layers on flash_qla. `import flash_qla` imports none of these modules."""
