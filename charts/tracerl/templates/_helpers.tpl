{{/* Name of what the release makes in its own namespace: the release's, and what it is. */}}
{{- define "tracerl.name" -}}
{{- $release := .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- if contains "tracerl" $release }}{{ $release }}-operator{{ else }}{{ $release }}-tracerl-operator{{ end -}}
{{- end -}}

{{- define "tracerl.account" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "tracerl.name" .) }}
{{- else -}}
{{ required "serviceAccount.name is needed where serviceAccount.create is false: write the name of an account that is there" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{/* What selects the operator's pods. A job's objects have another app.kubernetes.io/name: tracerl. */}}
{{- define "tracerl.selector" -}}
app.kubernetes.io/name: tracerl-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tracerl.labels" -}}
{{ include "tracerl.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: tracerl
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* An image as a container names it: (list . .Values.image). */}}
{{- define "tracerl.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- if regexMatch "@|:[^/]*$" $image.repository -}}
{{ fail (printf "%s is more than the repository of an image: write the part after the colon as tag, and sha256:… as digest" $image.repository) }}
{{- end -}}
{{ $image.repository }}:{{ $image.tag | default $root.Chart.AppVersion }}{{ if $image.digest }}@{{ $image.digest }}{{ end }}
{{- end -}}

{{/*
A text of files/ with the addresses of pages, @docs:PAGE@ there: (list . TEXT). Without docsUrl it is the page's path in
the repository, and no link.
*/}}
{{- define "tracerl.documented" -}}
{{- $root := index . 0 -}}
{{- $text := index . 1 -}}
{{- if $root.Values.docsUrl -}}
{{ regexReplaceAll "@docs:([^@]+)@" $text (replace "{page}" "${1}" $root.Values.docsUrl) }}
{{- else -}}
{{- $plain := regexReplaceAll "\\[([^][\n]+)\\]\\(@docs:([^@]+)@\\)" $text "${1}: docs/${2}.md" -}}
{{ regexReplaceAll "@docs:([^@]+)@" $plain "docs/${1}.md" }}
{{- end -}}
{{- end -}}

{{/* The canary's objects. Short enough for the 52 characters of a CronJob's name. */}}
{{- define "tracerl.canary.name" -}}
{{- $release := .Release.Name | trunc 36 | trimSuffix "-" -}}
{{- if contains "tracerl" $release }}{{ $release }}-canary{{ else }}{{ $release }}-tracerl-canary{{ end -}}
{{- end -}}

{{- define "tracerl.canary.namespace" -}}
{{ .Values.canary.namespace | default .Release.Namespace }}
{{- end -}}

{{/* Not the operator's: services, policies and budgets select its pods by name. */}}
{{- define "tracerl.canary.labels" -}}
app.kubernetes.io/name: tracerl-canary
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: tracerl
{{- end -}}
