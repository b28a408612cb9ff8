{{/* What a schema cannot say. Each sentence says what to do. */}}

{{/* `helm lint` goes on after `fail`, but not without the template that has the sentence as its name. */}}
{{- define "paceline.refuse" -}}
{{- fail . -}}
{{- include . . -}}
{{- end -}}

{{- define "paceline.checks" -}}
{{- $tls := .Values.tls -}}
{{- if not $tls.source -}}
{{- include "paceline.refuse" "choose tls.source: certManager, secrets, or none for connections in plaintext" -}}
{{- end -}}
{{- if and (eq $tls.source "certManager") (not $tls.certManager.issuerRef.name) -}}
{{- include "paceline.refuse" "tls.source is certManager: set tls.certManager.issuerRef.name" -}}
{{- end -}}
{{- if eq $tls.source "secrets" -}}
{{- range $owner := list "scheduler" "executor" "client" -}}
{{- if not (index $tls.secrets $owner) -}}
{{- include "paceline.refuse" (printf "tls.source is secrets: set tls.secrets.%s" $owner) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if .Values.gateway.enabled -}}
{{- include "paceline.checkGateway" . -}}
{{- end -}}
{{- if .Values.auth.tokens.secretName -}}
{{- if eq $tls.source "none" -}}
{{- include "paceline.refuse" "auth.tokens needs TLS, since tokens must not travel in plaintext: set tls.source" -}}
{{- end -}}
{{- if not .Values.auth.testToken.secretName -}}
{{- include "paceline.refuse" "auth.tokens is set: set auth.testToken.secretName too, for helm test" -}}
{{- end -}}
{{- end -}}
{{- if not .Values.pools -}}
{{- include "paceline.refuse" "name at least one pool of executors, such as --set pools.small.model.name=smollm2-135m-instruct" -}}
{{- end -}}
{{- include "paceline.checkService" . -}}
{{- include "paceline.checkPlacement" (dict "where" "scheduler" "values" .Values.scheduler) -}}
{{- include "paceline.checkArgs" (dict "where" "scheduler.args" "args" .Values.scheduler.args "own" (list "executors" "standby" "host" "port" "admin-host" "admin-port" "health-port" "metrics-port" "advertise" "shutdown-timeout" "cache-dir" "tls-dir" "tokens" "insecure")) -}}
{{- range $name, $values := .Values.pools -}}
{{- $pool := mustMergeOverwrite (deepCopy $.Values.poolDefaults) $values -}}
{{- include "paceline.checkPool" (dict "root" $ "name" $name "pool" $pool) -}}
{{- if $pool.autoscaling.enabled -}}
{{- include "paceline.checkAutoscaling" (dict "root" $ "name" $name "pool" $pool) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "paceline.checkService" -}}
{{- $service := .Values.service -}}
{{- $clients := .Values.networkPolicy.clients | toJson -}}
{{- if eq $service.type "ClusterIP" -}}
{{- if ne (int $service.port) 50051 -}}
{{- include "paceline.refuse" "service.port: a headless Service has the port of its pods, 50051: set service.type, or leave it" -}}
{{- end -}}
{{- else if and .Values.networkPolicy.enabled (not (contains "ipBlock" $clients)) -}}
{{- include "paceline.refuse" (printf "service.type is %s, and networkPolicy.clients keeps out who is outside: add an ipBlock" $service.type) -}}
{{- end -}}
{{- end -}}

{{- define "paceline.checkGateway" -}}
{{- $gateway := .Values.gateway -}}
{{- if and (eq .Values.tls.source "secrets") (not .Values.tls.secrets.gateway) -}}
{{- include "paceline.refuse" "tls.source is secrets, and there are gateways: set tls.secrets.gateway" -}}
{{- end -}}
{{- $scaling := $gateway.autoscaling -}}
{{- if and $scaling.enabled (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- include "paceline.refuse" "gateway: autoscaling.minReplicas is above autoscaling.maxReplicas" -}}
{{- end -}}
{{- if and $scaling.enabled (not (include "paceline.askedCpu" $gateway.resources)) -}}
{{- include "paceline.refuse" "gateway: autoscaling needs a CPU in resources, whose share it looks at" -}}
{{- end -}}
{{- $clients := $gateway.clients | toJson -}}
{{- if and .Values.networkPolicy.enabled (or $gateway.ingress.host $gateway.httpRoute.parentRefs) (not (regexMatch "ipBlock|namespaceSelector" $clients)) -}}
{{- include "paceline.refuse" "gateway.clients keeps out who is outside, and there is an Ingress or HTTPRoute: add a namespaceSelector or ipBlock" -}}
{{- end -}}
{{- include "paceline.checkPlacement" (dict "where" "gateway" "values" $gateway) -}}
{{- include "paceline.checkArgs" (dict "where" "gateway.args" "args" $gateway.args "own" (list "target" "host" "port" "metrics-port" "shutdown-timeout" "tls-dir" "insecure")) -}}
{{- end -}}

{{- define "paceline.checkPlacement" -}}
{{- if and .values.zones (dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" "" (default dict .values.affinity)) -}}
{{- include "paceline.refuse" (printf "%s: zones are required node affinity too: name them in affinity, and leave zones out" .where) -}}
{{- end -}}
{{- end -}}

{{- define "paceline.checkPool" -}}
{{- include "paceline.checkPlacement" (dict "where" (printf "pools.%s" .name) "values" .pool) -}}
{{- $model := .pool.model -}}
{{- if has .name (list "scheduler" "executors" "gateway") -}}
{{- include "paceline.refuse" (printf "pools.%s: another object has this name" .name) -}}
{{- end -}}
{{- if eq (empty $model.name) (not (regexMatch " --runner=simulated[: ]" (printf " %s " (join " " .pool.args)))) -}}
{{- include "paceline.refuse" (printf "pools.%s: set model.name, or --runner=simulated in args" .name) -}}
{{- end -}}
{{- if gt (len (compact (list $model.claimName $model.hostPath $model.init))) 1 -}}
{{- include "paceline.refuse" (printf "pools.%s: a model comes from one place: set one of model.claimName, model.hostPath and model.init" .name) -}}
{{- end -}}
{{- $here := or $model.claimName $model.hostPath $model.init -}}
{{- if and $here (or $model.revision $model.tokenSecret) -}}
{{- include "paceline.refuse" (printf "pools.%s: model.revision and model.tokenSecret are for models of the hub, and this one comes from a volume" .name) -}}
{{- end -}}
{{- if and $here (or (hasPrefix "/" $model.name) (contains ".." $model.name)) -}}
{{- include "paceline.refuse" (printf "pools.%s: model.name is a path inside the volume: no / before it, no .. in it" .name) -}}
{{- end -}}
{{- if and (gt (len .root.Values.pools) 1) (not $model.servedName) -}}
{{- include "paceline.refuse" (printf "pools.%s: there are several pools: set model.servedName" .name) -}}
{{- end -}}
{{- if and (not .pool.gpu.count) (not (kindIs "invalid" .pool.gpu.memoryUtilization)) -}}
{{- include "paceline.refuse" (printf "pools.%s: gpu.memoryUtilization needs gpu.count" .name) -}}
{{- end -}}
{{- if gt (int .pool.gpu.nodes) 1 -}}
{{- include "paceline.checkNodes" . -}}
{{- end -}}
{{- if gt (int (mul .pool.gpu.count .pool.gpu.nodes)) 1 -}}
{{- include "paceline.checkRanks" . -}}
{{- end -}}
{{- $own := list "model" "revision" "served-model-name" "host" "port" "health-port" "metrics-port" "shutdown-timeout" "cache-dir" "tls-dir" "insecure" "gpu-memory-utilization" -}}
{{- include "paceline.checkArgs" (dict "where" (printf "pools.%s.args" .name) "args" .pool.args "own" (empty .pool.gpu.count | ternary $own (concat $own (list "runner" "tensor-parallel-size" "node")))) -}}
{{- end -}}

{{/* A LeaderWorkerSet makes a Service of its own name, and StatefulSets of this name with numbers behind it. */}}
{{- define "paceline.checkNodes" -}}
{{- if eq .name "external" -}}
{{- include "paceline.refuse" (printf "pools.%s: a Service has this name: choose another for a pool with gpu.nodes" .name) -}}
{{- end -}}
{{- range $other, $_ := .root.Values.pools -}}
{{- if regexMatch (printf "^%s-[0-9]+$" $.name) $other -}}
{{- include "paceline.refuse" (printf "pools.%s: gpu.nodes of pools.%s makes an object of this name: choose another" $other $.name) -}}
{{- end -}}
{{- end -}}
{{- if not .pool.gpu.count -}}
{{- include "paceline.refuse" (printf "pools.%s: gpu.nodes needs gpu.count" .name) -}}
{{- end -}}
{{- if gt (int (mul .pool.gpu.count .pool.gpu.nodes)) 64 -}}
{{- include "paceline.refuse" (printf "pools.%s: an executor has 64 GPUs at most: lower gpu.count or gpu.nodes" .name) -}}
{{- end -}}
{{- if not .root.Values.networkPolicy.enabled -}}
{{- include "paceline.refuse" (printf "pools.%s: GPUs of several nodes talk in plaintext: set networkPolicy.enabled" .name) -}}
{{- end -}}
{{- end -}}

{{- define "paceline.checkRanks" -}}
{{- $gpu := .pool.gpu -}}
{{- if regexMatch "/mig-|[.]shared$" $gpu.resource -}}
{{- include "paceline.refuse" (printf "pools.%s: parts of GPUs, %s, cannot share a model: set gpu.count 1, or take whole ones" .name $gpu.resource) -}}
{{- end -}}
{{- $cpu := include "paceline.askedCpu" (default dict .pool.resources) -}}
{{- $cpus := hasSuffix "m" $cpu | ternary (divf (trimSuffix "m" $cpu) 1000) (float64 $cpu) -}}
{{- $least := add 2 $gpu.count -}}
{{- if and $cpu (lt $cpus (float64 $least)) -}}
{{- include "paceline.refuse" (printf "pools.%s: a rank for each of %v GPUs and two CPUs more: ask for %v in resources, or leave cpu out" .name $gpu.count $least) -}}
{{- end -}}
{{- end -}}

{{- define "paceline.checkAutoscaling" -}}
{{- $scaling := .pool.autoscaling -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- include "paceline.refuse" (printf "pools.%s: autoscaling.minReplicas is above autoscaling.maxReplicas" .name) -}}
{{- end -}}
{{- range $name, $values := .root.Values.pools -}}
{{- $other := mustMergeOverwrite (deepCopy $.root.Values.poolDefaults) $values -}}
{{- if and (ne $name $.name) (eq $other.model.servedName $.pool.model.servedName) -}}
{{- include "paceline.refuse" (printf "pools.%s: pools.%s has the same model, and autoscaling counts the requests of a model: give it one pool, or set replicas" $.name $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "paceline.checkArgs" -}}
{{- range .args -}}
{{- if has (trimPrefix "--" (regexReplaceAll "=.*" . "")) $.own -}}
{{- include "paceline.refuse" (printf "%s: the chart sets %s itself" $.where .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
