"""vitrail serve: a model as a service, with a page to try it on."""
