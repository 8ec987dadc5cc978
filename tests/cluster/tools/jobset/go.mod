// The definition of JobSet that test_rendered.py installs; nothing is built from it.
module jobset

go 1.26.0

require sigs.k8s.io/jobset v0.11.0
