{{/* What all pods share. The root file system is read-only: each writable folder is a volume. */}}

{{- define "paceline.podSettings" -}}
automountServiceAccountToken: false
# Else the services of the namespace would set variables that begin with PACELINE_.
enableServiceLinks: false
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- end -}}

{{- define "paceline.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{/* Where pods go: .values of a scheduler or pool, .spread in place of its own constraints, .who of the pods' labels. */}}
{{- define "paceline.placement" -}}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $affinity := deepCopy (default dict .values.affinity) }}
{{- with .values.zones }}
{{- $terms := list (dict "matchExpressions" (list (dict "key" "topology.kubernetes.io/zone" "operator" "In" "values" .))) }}
{{- $required := dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) }}
{{- $affinity = mustMerge $affinity (dict "nodeAffinity" $required) }}
{{- end }}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $own := dict "labelSelector" (dict "matchLabels" (include "paceline.selectorLabels" .who | fromYaml)) }}
{{- with .values.topologySpreadConstraints | default .spread }}
topologySpreadConstraints:
  {{- range . }}
  - {{- toYaml (hasKey . "labelSelector" | ternary . (mustMerge (deepCopy .) $own)) | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Probes on the plaintext health port. Ready is .service; live is the empty service. */}}
{{- define "paceline.livenessAndReadiness" -}}
readinessProbe:
  grpc:
    port: {{ .port }}
    service: {{ .service }}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
livenessProbe:
  grpc:
    port: {{ .port }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- define "paceline.tlsArg" -}}
{{- if include "paceline.hasTls" . -}}
--tls-dir=/etc/paceline/tls
{{- else -}}
--insecure
{{- end -}}
{{- end -}}

{{- define "paceline.tlsMount" -}}
{{- if include "paceline.hasTls" . -}}
- name: tls
  mountPath: /etc/paceline/tls
  readOnly: true
{{- end -}}
{{- end -}}

{{- define "paceline.tlsVolume" -}}
{{- if include "paceline.hasTls" .root -}}
- name: tls
  secret:
    secretName: {{ include "paceline.tlsSecret" . }}
    defaultMode: 0440
{{- end -}}
{{- end -}}

{{/* The CPUs that resources ask for; a limit asks, too. Empty if they say none. */}}
{{- define "paceline.askedCpu" -}}
{{- (default dict .requests).cpu | default (default dict .limits).cpu | default "" -}}
{{- end -}}
