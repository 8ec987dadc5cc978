// The definitions of PodMonitor and ServiceMonitor that the tests install; nothing is built from it.
module monitoring

go 1.26.0

require github.com/prometheus-operator/prometheus-operator v0.92.1
