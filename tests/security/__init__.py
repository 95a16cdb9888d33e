"""Attacks on kvplace, tried on a real API server.

The attacks of docs/security.md with the tests that fail when a protection is removed, here and elsewhere:

* certificates that are missing, expired, for servers, of another CA or name; old TLS; plain HTTP
    tests/serve/test_clients.py
        test_no_other_client_is_answered
        test_plain_http_is_not_answered
* slow headers, slow bodies, answers that are not taken, handshakes that do not end, too many connections
    tests/service/test_connections.py
* a TLS session that is resumed after its certificate has expired or its CA was replaced
    tests/serve/test_clients.py
        test_a_session_does_not_outlive_the_ca_of_its_certificate
* many scrapes at once
    tests/service/test_process.py
        test_scrapes_at_the_same_time_share_one_that_has_begun_after_all_of_them
* HTTP/2 floods
    tests/scheduler/test_http2_floods.py
* the web map without its secret URL, or from another site by DNS rebinding
    tests/web/test_access.py
        test_without_the_secret_path_no_client_learns_anything
        test_a_name_that_leads_to_this_machine_by_dns_rebinding_gets_nothing
    tests/cli/live_cluster/test_web.py
        test_the_browser_is_led_to_the_url_by_a_file_that_only_its_user_can_read
* scripts in names, pages in frames
    tests/web/test_pages.py
        test_names_that_resemble_html_are_shown_as_they_are
    tests/web/test_access.py
        test_every_answer_forbids_the_browser_whatever_the_map_does_not_need
* JSON that is deep, huge or broken, and too many nodes
    tests/scheduler/test_extender_protocol.py
    tests/admission/test_http.py
* many large requests that wait at once, and callers that disconnect
    tests/service/test_connections.py
        test_large_requests_that_wait_give_way_to_each_other_and_to_usual_ones
        test_the_work_for_a_caller_that_has_gone_ends_and_its_bytes_do_not_count
* reviews from pods
    tests/serve/test_clients.py
        test_admission_answers_no_pod_except_where_api_servers_call_through_pods
* reviews of pods with thousands of containers or hooks, many large reviews at once
    tests/admission/test_bounds.py
        test_a_usual_review_does_not_wait_for_all_large_ones_that_came_before_it
        test_a_usual_review_does_not_wait_for_all_smaller_ones_that_come_after_it
        test_no_answer_is_much_larger_than_its_question
        test_other_work_runs_between_any_two_reviews
* new pods, with the webhooks up and down
    tests/security/test_new_pods.py
        test_a_new_pod_brings_no_cores_with_it
* changes of a pod with results
    tests/security/test_tenants.py
        test_the_results_of_his_own_pod_stay_as_they_are
        test_an_ephemeral_container_changes_no_results
* results without the label
    tests/security/test_tenants.py
        test_a_running_pod_of_his_gets_no_label_and_so_no_results
* CPUs by an edit that the quota does not count
    tests/controller/test_counted_edits.py
* a smaller CPU request
    tests/admission/test_resized_pods.py
        test_no_client_lowers_the_cpu_request_of_a_pod_that_has_cpus
* bindings, status, ledgers, topologies, nodes, kvplace's own namespace
    tests/security/test_tenants.py
        test_objects_of_others_are_forbidden
* a hostile libvirt
    tests/libvirt/test_pinning_process.py
        test_a_libvirt_that_reports_huge_sizes_costs_no_more_than_the_stated_memory
        test_the_process_that_talks_to_a_libvirt_has_bounds_and_no_rights_on_the_node
    tests/agent/test_back_off.py
        test_a_pod_whose_value_changes_all_the_time_has_no_more_than_its_share
* messages of a VM used up from another namespace
    tests/kube/test_events.py
        test_a_pod_of_another_namespace_that_names_a_vm_does_not_use_up_its_messages
* an owner in another namespace
    tests/controller/test_relocation.py
        test_a_pod_elsewhere_that_claims_to_be_of_the_vm_does_not_stop_its_edit
* forged results on VMIs, which KubeVirt copies to pods
    tests/admission/test_pod.py
* a forged size on a VMI, so that its pods pay for less
    tests/security/test_vmis.py
"""
