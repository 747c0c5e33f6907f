"""A package, so that `import tests` never finds one that a dependency left in site-packages."""
