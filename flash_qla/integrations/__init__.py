"""flash_qla inside other libraries. Nothing here is imported by `import flash_qla`."""
