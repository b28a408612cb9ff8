{{/* The alerts. Each has a section in RUNBOOK.md; what Prometheus fills in itself is quoted twice. */}}

{{- define "paceline.alerts" -}}
{{- $values := .Values.monitoring.rules -}}
{{- $of := include "paceline.ofSchedulers" . -}}
- alert: PacelineQueueGrowing
  # Of all schedulers first: else the queue of one that takes over would seem to grow.
  expr: |-
    sum by (model_name) (paceline_num_requests_waiting{ {{- $of -}} }) > {{ $values.queuedRequests }}
    and deriv(sum by (model_name) (paceline_num_requests_waiting{ {{- $of -}} })[15m:1m]) > 0
  for: 10m
  {{- include "paceline.alert" (dict "values" $values "name" "PacelineQueueGrowing" "severity" "warning"
    "summary" "The queue of {{ $labels.model_name }} grows"
    "description" "{{ $value }} requests wait for {{ $labels.model_name }}, and for 10 minutes they have become more.") | nindent 2 }}
- alert: PacelineKvCacheFull
  expr: |-
    max by (model_name) (paceline_kv_cache_usage_perc{ {{- $of -}} }) > 0.95
    and sum by (model_name) (paceline_num_requests_waiting{ {{- $of -}} }) > 0
  for: 10m
  {{- include "paceline.alert" (dict "values" $values "name" "PacelineKvCacheFull" "severity" "warning"
    "summary" "The KV cache of {{ $labels.model_name }} is full"
    "description" "{{ $value | humanizePercentage }} of the blocks of {{ $labels.model_name }} are in use, and requests wait.") | nindent 2 }}
- alert: PacelineExecutorLost
  expr: max by (executor) (paceline_executor_lost_seconds{ {{- $of -}} }) > 0
  # Longer than a restart with the model to load.
  for: {{ include "paceline.startupBudgetSeconds" . | add 60 }}s
  {{- include "paceline.alert" (dict "values" $values "name" "PacelineExecutorLost" "severity" "warning"
    "summary" "Executor {{ $labels.executor }} is lost"
    "description" "{{ $labels.executor }} has not answered for {{ $value | humanizeDuration }}, longer than it may take to start.") | nindent 2 }}
- alert: PacelineExecutorRestarts
  # One that serves for a while each time is never lost for long. A group of nodes comes back as other pods of the same names.
  expr: |-
    changes(process_start_time_seconds{ {{- include "paceline.ofExecutors" . -}} }[1h]) > 2
    {{- range $name, $pool := .Values.pools }}
    {{- if gt (int (mustMergeOverwrite (deepCopy $.Values.poolDefaults) $pool).gpu.nodes) 1 }}
    or changes(max by (pod) (process_start_time_seconds{ {{- include "paceline.ofExecutors" $ -}} ,pod=~"{{ include "paceline.fullname" $ }}-{{ $name }}-[0-9]+"})[1h:1m]) > 2
    {{- end }}
    {{- end }}
  {{- include "paceline.alert" (dict "values" $values "name" "PacelineExecutorRestarts" "severity" "warning"
    "summary" "Executor {{ or $labels.instance $labels.pod }} restarts again and again"
    "description" "{{ or $labels.instance $labels.pod }} has been restarted {{ $value }} times within an hour.") | nindent 2 }}
- alert: PacelineModelGone
  # Of schedulers that never had an executor no model is known, and one that stands by has lost none.
  expr: |-
    min by (model_name) (
      max by (executor, model_name) (paceline_executor_lost_seconds{ {{- $of -}} ,model_name!=""})) > 0
    or sum(paceline_executors{ {{- $of -}} }) == 0
  for: {{ include "paceline.startupBudgetSeconds" . | add 60 }}s
  {{- include "paceline.alert" (dict "values" $values "name" "PacelineModelGone" "severity" "critical"
    "summary" "No executor {{ with $labels.model_name }}of {{ . }} {{ end }}is left"
    "description" "Every executor {{ with $labels.model_name }}of {{ . }} {{ end }}is lost or gone, for longer than one may take to start.") | nindent 2 }}
- alert: PacelinePreemptions
  expr: |-
    sum by (model_name) (rate(paceline_num_preemptions_total{ {{- $of -}} }[10m]))
    / sum by (model_name) (rate(paceline_request_success_total{ {{- $of -}} }[10m])) > 0.08
  for: 10m
  {{- include "paceline.alert" (dict "values" $values "name" "PacelinePreemptions" "severity" "warning"
    "summary" "Requests of {{ $labels.model_name }} are often preempted"
    "description" "There are {{ $value | humanizePercentage }} as many preemptions as ended requests of {{ $labels.model_name }}.") | nindent 2 }}
- alert: PacelineFirstTokenLate
  expr: |-
    histogram_quantile(0.95,
      sum by (model_name, le) (rate(paceline_time_to_first_token_seconds_bucket{ {{- $of -}} }[5m]))) > {{ $values.ttftSeconds }}
  for: 10m
  {{- include "paceline.alert" (dict "values" $values "name" "PacelineFirstTokenLate" "severity" "warning"
    "summary" "First tokens of {{ $labels.model_name }} are late"
    "description" "One in twenty takes more than {{ $value | humanizeDuration }}.") | nindent 2 }}
- alert: PacelineNoProgress
  expr: |-
    sum by (model_name) (paceline_num_requests_running{ {{- $of -}} } + paceline_num_requests_waiting{ {{- $of -}} }) > 0
    unless sum by (model_name) (
      rate(paceline_step_seconds_count{ {{- $of -}} ,phase="forward"}[5m])
      * on (instance, executor) group_left (model_name) paceline_cache_config_info{ {{- $of -}} }
    ) > 0
  for: 2m
  {{- include "paceline.alert" (dict "values" $values "name" "PacelineNoProgress" "severity" "critical"
    "summary" "Requests of {{ $labels.model_name }} make no progress"
    "description" "{{ $value }} requests of {{ $labels.model_name }} run or wait, and for 5 minutes no executor has ended a step.") | nindent 2 }}
- alert: PacelineRefusing
  expr: |-
    sum by (reason) (rate(paceline_admission_rejections_total{ {{- $of -}} ,reason=~"QUEUE_FULL|NO_EXECUTOR|DEADLINE_UNREACHABLE"}[5m])) > 0
  for: 10m
  {{- include "paceline.alert" (dict "values" $values "name" "PacelineRefusing" "severity" "warning"
    "summary" "Requests are refused: {{ $labels.reason }}"
    "description" "{{ $value | humanize }} requests are refused in a second with {{ $labels.reason }}.") | nindent 2 }}
- alert: PacelineNoScheduler
  expr: absent(paceline_executors{ {{- $of -}} })
  for: 2m
  {{- include "paceline.alert" (dict "values" $values "name" "PacelineNoScheduler" "severity" "critical"
    "summary" "No scheduler shows metrics"
    "description" "Prometheus finds no metrics of a scheduler in {{ $labels.namespace }} under the job {{ $labels.job }}.") | nindent 2 }}
{{- end -}}

{{- define "paceline.alert" -}}
labels:
  severity: {{ .severity }}
annotations:
  summary: {{ .summary | quote }}
  description: {{ .description | quote }}
  runbook_url: {{ .values.runbookUrl }}#{{ lower .name }}
{{- end -}}
