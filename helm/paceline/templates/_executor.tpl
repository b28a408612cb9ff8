{{/* A pod of a pool: .root, .name, .pool, and .component of its labels: executor, or executor-node, which has a part of
the ranks of an executor on another node. */}}

{{- define "paceline.executorPod" -}}
{{- $root := .root }}
{{- $pool := .pool }}
{{- $model := $pool.model }}
{{- $here := or $model.claimName $model.hostPath $model.init }}
{{- $hasGpu := gt (int $pool.gpu.count) 0 }}
{{- $hasNodes := gt (int $pool.gpu.nodes) 1 }}
{{- $hasRanks := or $hasNodes (gt (int $pool.gpu.count) 1) }}
{{- $who := dict "root" $root "component" .component "pool" .name -}}
metadata:
  labels:
    {{- include "paceline.selectorLabels" $who | nindent 4 }}
  {{- with $pool.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "paceline.podSettings" $root | nindent 2 }}
  {{- with include "paceline.placement" (dict "values" $pool "who" $who "spread" list) | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $pool.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add 10 $pool.shutdownTimeoutSeconds }}
  {{- with $model.init }}
  initContainers:
    - name: model
      {{- pick . "image" "command" "args" "env" "envFrom" "resources" | toYaml | nindent 6 }}
      {{- include "paceline.containerSecurity" $root | nindent 6 }}
      volumeMounts:
        - name: cache
          mountPath: /models
          subPath: models-of-init
        - name: tmp
          mountPath: /tmp
  {{- end }}
  containers:
    - name: executor
      image: {{ include "paceline.image" (dict "root" $root "name" (printf "paceline-executor-%s" ($hasGpu | ternary "cuda" "cpu")) "own" $pool.image) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        {{- with $model.name }}
        - "--model={{ $here | empty | ternary "" "/models/" }}{{ . }}"
        {{- end }}
        {{- with $model.revision }}
        - "--revision={{ . }}"
        {{- end }}
        {{- with $model.servedName }}
        - "--served-model-name={{ . }}"
        {{- end }}
        {{- if $hasGpu }}
        - --runner=cuda
        {{- end }}
        {{- if $hasRanks }}
        - "--tensor-parallel-size={{ mul $pool.gpu.nodes $pool.gpu.count }}"
        {{- end }}
        {{- if $hasNodes }}
        - "--node=$(LWS_WORKER_INDEX)/$(LWS_GROUP_SIZE)@$(LWS_LEADER_ADDRESS):7070"
        {{- end }}
        {{- if not (kindIs "invalid" $pool.gpu.memoryUtilization) }}
        - "--gpu-memory-utilization={{ $pool.gpu.memoryUtilization }}"
        {{- end }}
        - "--host={{ $root.Values.listenAddress }}"
        - --port=50061
        - --health-port=50063
        - --metrics-port=9465
        - "--shutdown-timeout={{ $pool.shutdownTimeoutSeconds }}"
        - {{ include "paceline.tlsArg" $root }}
        {{- with $pool.args }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if or $here $model.tokenSecret $pool.env }}
      env:
        {{- if $here }}
        - name: HF_HUB_OFFLINE
          value: "1"
        {{- end }}
        {{- with $model.tokenSecret }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef:
              {{- toYaml . | nindent 14 }}
        {{- end }}
        {{- with $pool.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
      {{- if eq .component "executor" }}
      ports:
        - name: grpc
          containerPort: 50061
        - name: health
          containerPort: 50063
        - name: metrics
          containerPort: 9465
      startupProbe:
        grpc:
          port: 50063
          service: paceline.v1.ExecutorService
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: {{ div (add 1 $pool.startupBudgetSeconds) 2 }}
      {{- include "paceline.livenessAndReadiness" (dict "port" 50063 "service" "paceline.v1.ExecutorService") | nindent 6 }}
      {{- end }}
      resources:
        {{- $resources := deepCopy (default dict $pool.resources) }}
        {{- if $hasGpu }}
        {{- $limits := merge (dict $pool.gpu.resource $pool.gpu.count) (default dict $resources.limits) }}
        {{- $resources = set $resources "limits" $limits }}
        {{- end }}
        {{- if and $hasRanks (not (include "paceline.askedCpu" $resources)) }}
        {{- $resources = mustMerge $resources (dict "requests" (dict "cpu" (add 2 $pool.gpu.count | toString))) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      {{- include "paceline.containerSecurity" $root | nindent 6 }}
      volumeMounts:
        - name: cache
          mountPath: /var/cache/paceline
        - name: tmp
          mountPath: /tmp
        {{- if $hasRanks }}
        - name: shm
          mountPath: /dev/shm
        {{- end }}
        {{- if $model.init }}
        - name: cache
          mountPath: /models
          subPath: models-of-init
          readOnly: true
        {{- else if $here }}
        - name: models
          mountPath: /models
          readOnly: true
        {{- end }}
        {{- include "paceline.tlsMount" $root | nindent 8 }}
  volumes:
    - name: tmp
      emptyDir:
        sizeLimit: 1Gi
    {{- if $hasRanks }}
    # NCCL ends where it does not fit into the 64 MiB that containers have.
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $pool.gpu.count }}Gi
    {{- end }}
    {{- if not $pool.cache.persistent }}
    - name: cache
      emptyDir:
        sizeLimit: {{ $pool.cache.size }}
    {{- end }}
    {{- with $model.claimName }}
    - name: models
      persistentVolumeClaim:
        claimName: {{ . }}
        readOnly: true
    {{- end }}
    {{- with $model.hostPath }}
    - name: models
      hostPath:
        path: {{ . }}
        type: Directory
    {{- end }}
    {{- include "paceline.tlsVolume" (dict "root" $root "owner" "executor") | nindent 4 }}
{{- end -}}

{{/* Of a StatefulSet, or of the template of a group. */}}
{{- define "paceline.cacheClaim" -}}
{{- if .cache.persistent }}
# A cache may go with its executor, unless this one soon comes back.
persistentVolumeClaimRetentionPolicy:
  whenDeleted: Delete
  whenScaled: {{ $.autoscaling.enabled | ternary "Retain" "Delete" }}
volumeClaimTemplates:
  - metadata:
      name: cache
    spec:
      accessModes: [ReadWriteOnce]
      {{- with $.cache.storageClassName }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests:
          storage: {{ $.cache.size }}
{{- end }}
{{- end -}}
