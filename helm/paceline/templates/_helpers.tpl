{{/* Names, labels, images. */}}

{{- define "paceline.fullname" -}}
{{- $own := ternary .Release.Name (printf "%s-paceline" .Release.Name) (contains "paceline" .Release.Name) -}}
{{- $name := default $own .Values.fullnameOverride -}}
{{- if gt (len $name) 30 -}}
{{- include "paceline.refuse" (printf "the name %s has more than 30 characters: set fullnameOverride" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "paceline.executors" -}}
{{ include "paceline.fullname" . }}-executors
{{- end -}}

{{- define "paceline.selectorLabels" -}}
app.kubernetes.io/name: paceline
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
paceline-pool: {{ . }}
{{- end }}
{{- end -}}

{{- define "paceline.labels" -}}
{{ include "paceline.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* What the Prometheus operator labels metrics with: its job is the name of a Service. */}}
{{- define "paceline.ofSchedulers" -}}
{{ printf "namespace=%q,job=%q" .Release.Namespace (include "paceline.fullname" .) }}
{{- end -}}

{{- define "paceline.ofExecutors" -}}
{{ printf "namespace=%q,job=%q" .Release.Namespace (include "paceline.executors" .) }}
{{- end -}}

{{/* Seconds until every pool must be ready. */}}
{{- define "paceline.startupBudgetSeconds" -}}
{{- $budget := 0 -}}
{{- range .Values.pools -}}
{{- $budget = max $budget (mustMergeOverwrite (deepCopy $.Values.poolDefaults) .).startupBudgetSeconds -}}
{{- end -}}
{{- $budget -}}
{{- end -}}

{{/* .name of an image that `helm/images` builds, and .own, a whole reference in its place. */}}
{{- define "paceline.image" -}}
{{- $image := .root.Values.image -}}
{{- $built := printf "%s:%s" .name (default .root.Chart.AppVersion $image.tag) -}}
{{- default (empty $image.registry | ternary $built (printf "%s/%s" $image.registry $built)) .own -}}
{{- end -}}

{{/* Whose certificate: .owner is scheduler, executor, client or gateway; with cert-manager also operator. */}}
{{- define "paceline.tlsSecret" -}}
{{- if eq .root.Values.tls.source "certManager" -}}
{{- printf "%s-%s-tls" (include "paceline.fullname" .root) .owner -}}
{{- else -}}
{{- index .root.Values.tls.secrets .owner -}}
{{- end -}}
{{- end -}}

{{- define "paceline.hasTls" -}}
{{- if ne .Values.tls.source "none" }}true{{ end -}}
{{- end -}}
